"""`kimi bench`: how fast each part runs, against a limit measured in the same run."""
