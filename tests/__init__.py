"""Mirrors the package."""
