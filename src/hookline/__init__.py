"""See and change any value in a PyTorch model, forward and backward, without touching its code."""
from hookline.hooks.functions import hook
from hookline.hooks.visits import KEEP, MISSING, At
