"""Resources as types: LLMDeployment and InstancePool."""
