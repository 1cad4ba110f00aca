"""The books and the decisions: pure, no I/O, clock, threads, logging or randomness."""
