"""Tests of the C rooms, one file a room, all through kimi_cli.native."""
