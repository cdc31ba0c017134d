from .page import Page as Page
