"""Values changed: actions, their conditions, skipping a module, and attaching them to a model."""
