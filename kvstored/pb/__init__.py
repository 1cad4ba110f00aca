"""Generated from proto/kvstored/v1 by scripts/generate-protos; never edited."""
