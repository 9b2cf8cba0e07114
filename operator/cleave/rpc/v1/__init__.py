"""Generated from proto/cleave/rpc/v1; do not edit."""
