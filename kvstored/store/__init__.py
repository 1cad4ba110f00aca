"""The shell around the catalog: lanes of threads, copies on their way, recovery, and the janitor. The only place that awaits tiers."""
