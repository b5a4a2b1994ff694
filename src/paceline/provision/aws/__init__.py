"""Nodes of one's own on AWS: made as one CloudFormation stack, and taken down as one."""
