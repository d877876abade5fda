"""What the tests share: a model without weights, an oracle, and the two of them tied to a runtime."""
