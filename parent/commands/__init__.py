"""One small file per verb of `mlxd`: its arguments and what it does; printing, nothing else."""
