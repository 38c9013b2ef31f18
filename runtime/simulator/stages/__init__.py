"""The simulated workers, and the requests on their way through them."""
