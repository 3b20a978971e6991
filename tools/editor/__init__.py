"""The `editor` tool: view and change the files of the episode's box, with a way back."""

from penstock.tools.editor.tool import EditorTool

__all__ = ["EditorTool"]
