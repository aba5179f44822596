"""What machines are: named, probed, surveyed; and the networks between them."""
