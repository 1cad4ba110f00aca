"""The methods of the local channel: name, number on the wire, message classes.

Numbers are part of the protocol: only added, never reused. Streaming calls of the gRPC service are
not here, except KeepAlive, which is one message and one answer on the local channel. Segment and Projection
exist only here: their answers carry a descriptor; so do GpuPool and WaitLayers, whose handles are of use on this host only, and ReportBulk and
AcquireStored, which are the front's own.
"""

from dataclasses import dataclass

from google.protobuf.message import Message

from kvstored.pb import kvstored_pb2 as pb

SERVICE = "kvstored.v1.Kvstored"


@dataclass(frozen=True, slots=True)
class Method:
    """`is_prompt`: it is answered without waiting for anything, so that no deadline passes meanwhile."""

    name: str
    number: int
    request: type[Message]
    response: type[Message]
    is_prompt: bool = False

    @property
    def path(self) -> str:
        """Its name as a gRPC path."""
        return f"/{SERVICE}/{self.name}"


SEGMENT = Method("Segment", 1, pb.SegmentRequest, pb.SegmentResponse)
PROJECTION = Method("Projection", 36, pb.ProjectionRequest, pb.ProjectionResponse)
KEEP_ALIVE = Method("KeepAlive", 3, pb.KeepAliveRequest, pb.KeepAliveResponse)
GPU_POOL = Method("GpuPool", 41, pb.GpuPoolRequest, pb.GpuPoolResponse)
WAIT_LAYERS = Method("WaitLayers", 53, pb.WaitLayersRequest, pb.WaitLayersResponse)
REPORT_BULK = Method("ReportBulk", 40, pb.ReportBulkRequest, pb.ReportBulkResponse)
ACQUIRE_STORED = Method("AcquireStored", 60, pb.AcquireStoredRequest, pb.AcquireStoredResponse)

METHODS = (
    SEGMENT,
    Method("OpenSession", 2, pb.OpenSessionRequest, pb.OpenSessionResponse),
    KEEP_ALIVE,
    Method("CloseSession", 4, pb.CloseSessionRequest, pb.CloseSessionResponse),
    Method("OpenNamespace", 5, pb.OpenNamespaceRequest, pb.OpenNamespaceResponse),
    Method("ListNamespaces", 6, pb.ListNamespacesRequest, pb.ListNamespacesResponse),
    Method("RetireNamespace", 7, pb.RetireNamespaceRequest, pb.RetireNamespaceResponse),
    Method("RemoveNamespace", 8, pb.RemoveNamespaceRequest, pb.RemoveNamespaceResponse),
    Method("Match", 9, pb.MatchRequest, pb.MatchResponse, is_prompt=True),
    Method("Locate", 10, pb.LocateRequest, pb.LocateResponse),
    Method("Reserve", 11, pb.ReserveRequest, pb.ReserveResponse),
    Method("Commit", 12, pb.CommitRequest, pb.CommitResponse, is_prompt=True),
    Method("Abort", 13, pb.AbortRequest, pb.AbortResponse, is_prompt=True),
    Method("ReplaceIf", 14, pb.ReplaceIfRequest, pb.ReserveResponse),
    Method("Acquire", 15, pb.AcquireRequest, pb.AcquireResponse),
    Method("Renew", 16, pb.RenewRequest, pb.RenewResponse),
    Method("Release", 17, pb.ReleaseRequest, pb.ReleaseResponse, is_prompt=True),
    Method("Pin", 18, pb.PinRequest, pb.PinResponse),
    Method("Unpin", 19, pb.UnpinRequest, pb.UnpinResponse),
    Method("Prefetch", 20, pb.PrefetchRequest, pb.PrefetchResponse),
    Method("JobStatus", 21, pb.JobStatusRequest, pb.JobStatusResponse),
    Method("CancelJob", 22, pb.CancelJobRequest, pb.JobStatusResponse),
    Method("BeginRequest", 23, pb.BeginRequestRequest, pb.BeginRequestResponse),
    Method("ExtendRequest", 24, pb.ExtendRequestRequest, pb.ExtendRequestResponse),
    Method("CompleteRequest", 25, pb.CompleteRequestRequest, pb.CompleteRequestResponse),
    Method("Remove", 26, pb.RemoveRequest, pb.RemoveResponse),
    Method("Clear", 27, pb.ClearRequest, pb.ClearResponse),
    Method("Touch", 28, pb.TouchRequest, pb.TouchResponse, is_prompt=True),
    Method("Report", 29, pb.ReportRequest, pb.ReportResponse),
    Method("Stat", 30, pb.StatRequest, pb.StatResponse),
    Method("Tree", 31, pb.TreeRequest, pb.TreeResponse),
    Method("Leases", 32, pb.LeasesRequest, pb.LeasesResponse),
    Method("Explain", 33, pb.ExplainRequest, pb.ExplainResponse),
    Method("Verify", 34, pb.VerifyRequest, pb.VerifyResponse),
    Method("PollEvents", 35, pb.PollEventsRequest, pb.PollEventsResponse),
    PROJECTION,
    Method("SetAside", 37, pb.SetAsideRequest, pb.SetAsideResponse, is_prompt=True),
    Method("PutAside", 38, pb.PutAsideRequest, pb.PutAsideResponse, is_prompt=True),
    REPORT_BULK,
    ACQUIRE_STORED,
    GPU_POOL,
    WAIT_LAYERS,
    Method("ReserveBandwidth", 42, pb.ReserveBandwidthRequest, pb.ReserveBandwidthResponse),
    Method("ReportAccess", 51, pb.ReportAccessRequest, pb.ReportAccessResponse),
    Method("ReportResident", 52, pb.ReportResidentRequest, pb.ReportResidentResponse),
    Method("Schedule", 50, pb.ScheduleRequest, pb.ScheduleResponse),
)

BY_NAME = {method.name: method for method in METHODS}
BY_NUMBER = {method.number: method for method in METHODS}
