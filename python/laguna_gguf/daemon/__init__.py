"""`pflash_daemon`: prompt compression as a local service, on the old stdio wire, and as a proxy (extra `daemon`).

`front` is the process that clients talk to; it never loads llama.cpp. `child` is the process that does: it loads the
drafter, and `model` in the front starts it, feeds it one request at a time and starts it again when it dies. Both and
the clients speak the frames of `protocol`. `proxy` stands in front of llama-server.
"""
