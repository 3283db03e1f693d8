"""Words that the parent and the workers must agree on: wire types and stateless helpers, nothing else."""
