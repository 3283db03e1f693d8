"""Training of adapters over the native graphs: passes that remember nothing, gradients, losses, and the loop."""
