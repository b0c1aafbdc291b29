"""Generation for the routes: submits requests and converts outputs to parts of answers."""
