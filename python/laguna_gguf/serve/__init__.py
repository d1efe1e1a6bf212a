"""An OpenAI-compatible HTTP server over one SpecSession (extra `serve`).

`server` runs uvicorn, `app` has the routes, `worker` the one thread that owns the model, `generation` what that thread
does for a request. Requests are checked in `fields`, `messages` and `requests` before they reach the thread.
"""
