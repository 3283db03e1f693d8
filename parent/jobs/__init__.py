"""Jobs: long work in a worker process of its own."""
