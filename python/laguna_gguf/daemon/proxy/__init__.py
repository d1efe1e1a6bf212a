"""The proxy in front of llama-server: long prompts are compressed, everything else passes through untouched.

`server` runs uvicorn, `app` has the routes, `requests` reads what a body asks for, `compression` makes a long body
shorter, `messages` maps what is kept of a rendered prompt to the messages it was rendered of, `upstream` talks to the
server behind, `answers` passes its answers on, `history` and `status_page` show what happened.
"""
