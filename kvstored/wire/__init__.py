"""Messages and what they mean: methods, statuses, packed arrays, namespaces. No sockets, no
files.
"""
