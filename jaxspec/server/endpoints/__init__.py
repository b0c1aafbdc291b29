"""The routes, a file for each family. Each has a `router`; `app.make_app` joins them."""
