"""The processes that send load, and the parts that they are made of."""
