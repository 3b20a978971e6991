from .tools import McpTools as McpTools
