"""A server for the client of the Tinker API: a Learner and an Engine on the same devices."""
