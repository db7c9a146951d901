"""kimi: run Kimi K3 on one CPU, exactly, in as little memory as the user allows."""
