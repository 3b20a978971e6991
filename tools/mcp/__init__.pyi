from .group import McpTools as McpTools
