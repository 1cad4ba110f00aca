"""The command line. Commands translate: what they do lies below."""
