"""The engine: one thread that owns mlx and runs one scheduler over rows. See `design.md`."""
