"""How the built-in checkpoint that speaks was made: text, vocabulary, model, training, export.

Development only: it needs torch and Debian's bible-kjv, which the program itself never does. The
torch code is a second implementation of the model and uses nothing of the engine.

    python -m tests.builtin.text DIR        text.json, tiktoken.model, the token streams
    python -m tests.builtin.train DIR       training, resumable; log.csv and checkpoint.pt
    python -m tests.builtin.export DIR OUT  the checkpoint in the official format
    python -m tests.builtin.evaluate DIR    held-out loss, n-gram baselines, routing, loss curve
"""
