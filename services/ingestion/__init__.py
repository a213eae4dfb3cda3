"""Takes items and interactions in, durably, and makes data sets of them."""
