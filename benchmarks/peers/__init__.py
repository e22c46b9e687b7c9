"""One adapter for each engine that is compared, and the protocol by which the driver talks to them."""
