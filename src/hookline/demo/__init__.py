"""See hookline at work: `make demo`, or `python -m hookline.demo`.

train_gpt.py   a plain training script, whose loss becomes NaN at some step
__main__.py    runs it under `hookline run`, as anybody would run their own
"""
