"""Metrics of the server: histograms, snapshots, Prometheus export and step times."""
