"""A node's metrics: what each role writes into its table, and Prometheus's text of it."""
