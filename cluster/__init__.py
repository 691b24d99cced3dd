"""One or two boxes as one service: configuration, Ray, supervision, the ``twinspark`` command line."""
