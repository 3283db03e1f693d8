"""What jobs of the lab do besides training: data sets, measurements. Nothing here imports mlx but `scoring`."""
