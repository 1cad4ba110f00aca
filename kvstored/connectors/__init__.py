"""Connectors of inference engines: one thin module an engine, over the parts here. Importing this package imports no engine.

What every connector shares:

- `identity`: the namespace of an engine's KV (weights fingerprint, layout, shape) and the extra keys of a request.
- `guarded.GuardedNamespace`: the namespace as an engine may use it. Nothing raises and nothing waits beyond its limit: while the daemon
  is away, hung or refuses, a call is a miss.
- `options.ConnectorOptions`: what a user may set, read from the engine's own JSON.
- `statistics.Statistics`: what happened, for the engine's metrics.
- `versions`: which releases of an engine a connector is written for.
"""
