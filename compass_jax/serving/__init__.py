"""What stands between the network and the engine: limits, connections, the guard at the door,
metrics, text in pieces."""
