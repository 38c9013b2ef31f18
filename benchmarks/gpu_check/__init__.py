"""All checks and measurements of the search engine on one GPU, in one run of a few minutes."""
