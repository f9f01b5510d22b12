"""What one step holds: named fields, their shapes, dtypes and roles."""

from mmreplay.schema.dtypes import DTYPES, storage_dtype
from mmreplay.schema.field import Field
from mmreplay.schema.schema import ROLES, Schema

__all__ = ["DTYPES", "ROLES", "Field", "Schema", "storage_dtype"]
