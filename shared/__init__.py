"""What every service stands on: contracts, queues, jobs, artifacts, catalog, models, decoding."""
