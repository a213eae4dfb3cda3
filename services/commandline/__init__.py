"""The command line: a client that talks REST and starts processes; imports no room."""
