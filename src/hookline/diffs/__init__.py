"""Two runs, one answer: the first place where they differ. Knows no models.

traces.py     what is compared: sites in the order of execution, and their numbers
"""
