"""How a model shares a device's memory: the plan, and the weights that are on the device only where they are needed."""
