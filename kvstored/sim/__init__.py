"""Replay of real request traces: on the pure core (offline) and against a running daemon (live)."""
