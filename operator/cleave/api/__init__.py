"""The resources LLMDeployment and InstancePool as types."""
