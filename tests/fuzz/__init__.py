"""Fuzzing: any bytes in any file that `kimi` reads end in success or in one of its errors.

`targets.py` lists what is fuzzed, `run.py` drives one target by coverage with atheris, and
`test_fuzz.py`, beside this folder, plays the saved inputs back without it. The C entry points have
a program of their own, `operations.c`.
"""
