from .tool import EditorTool as EditorTool
