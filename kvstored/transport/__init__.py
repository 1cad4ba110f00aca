"""The daemon's end of its channels: the local channel, and the gRPC front (a process of its
own).
"""
