"""What both HTTP servers share: limits, bodies, errors in llama-server's shape, connections. Nothing of models."""
