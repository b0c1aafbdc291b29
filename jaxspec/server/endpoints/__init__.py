"""Routes of the server, one module per family. `app.make_app` includes each `router`."""
